"""What is learned from the first gradients: the codebook and the block structure."""
