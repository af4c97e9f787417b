"""Functions on tensors: attention whose scores are processed as feature maps."""
