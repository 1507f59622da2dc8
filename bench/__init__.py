"""Measurements. Results are committed under ``bench/results``; nothing here is a test."""
