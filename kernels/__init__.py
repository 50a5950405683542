"""What runs inside the training process: LoRA under sequence parallelism, patches."""
