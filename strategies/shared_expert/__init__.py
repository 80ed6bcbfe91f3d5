"""Shared experts beside dispatch and combine."""
