"""Update rules: pure functions on fp32 (fp64) tensors that read like their papers. They know nothing of storage."""
