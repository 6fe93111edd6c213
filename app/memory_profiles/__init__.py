"""Memory profiles, and what jobs measured of memory and throughput."""
