"""One thread, since models this small are slower with more."""

import torch

torch.set_num_threads(1)
