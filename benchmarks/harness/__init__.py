"""Shared by all benchmarks: records, paired runs, process trees and runs of the example."""
