"""What a run reports: metrics.jsonl, TensorBoard, the progress line, profiles, goodput."""
