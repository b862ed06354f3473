"""Independent textbook versions of what the library computes: slow, plain, fp64 numpy, from the mathematics alone."""
