"""Memory profiles of training steps, simulated without the weights; and previews of
data, made by the same process. What a job's `profile: true` writes with torch.profiler is in
workers/training/reporting/torch_profile.py."""
