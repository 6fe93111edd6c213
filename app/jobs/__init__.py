"""Jobs: their states, their events, why they wait, and how they are read."""
