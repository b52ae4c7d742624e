"""Real ssh servers on this machine, made and removed by the tests."""
