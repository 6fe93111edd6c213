"""One file per surface. A route holds the session; the rules are elsewhere."""
