"""What state takes: predicted from shapes, and measured on a live optimizer."""
