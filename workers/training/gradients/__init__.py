"""Where and how a window's gradients are summed, and the noise that is measured on the way."""
