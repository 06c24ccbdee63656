"""Config machinery: recipes, presets, defaults, and which keys go together."""
