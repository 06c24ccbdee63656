"""Where examples come from: data sets by name, their builders and their catalog."""
