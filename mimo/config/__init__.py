"""What people type: the schema, where each value was written, phases."""
