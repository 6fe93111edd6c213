"""The peak of live tensor bytes on a CPU, from the allocator's own events."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(work: Callable[[], object]) -> int:
    """The peak of live bytes during the work, minus the bytes that were live before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
