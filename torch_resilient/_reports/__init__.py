"""Reports of this process as typed values: stats(), topology() and recent events."""
