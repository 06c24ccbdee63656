"""Model folders of Hugging Face: their config.json, their tensors, in both directions."""
