"""The loop: measure parts, calibrate, predict whole operators of other sizes, run them, compare."""
