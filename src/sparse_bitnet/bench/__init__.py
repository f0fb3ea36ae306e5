"""Measuring the engine: random models of real shapes, ceilings of the machine, speeds, records."""
