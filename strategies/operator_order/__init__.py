"""The operator_order strategy."""
