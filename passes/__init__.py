"""The graph language (schemes, weights, ops and their reference semantics) and what rewrites a graph."""
