"""A run predicted on devices that need not be attached: memory, communication, step time."""
