"""Everything between a finalized config and a trained model."""
