"""Planning: pure functions of values. No session, no file, no clock."""
