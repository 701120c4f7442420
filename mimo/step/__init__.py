"""Everything about a step before a tensor exists: data, plan, loading."""
