"""GPU code on stub devices (`tests.support.stub_cuda`), in the environment of GPU machines: `make rehearse`.

A case is a script that prints a line of JSON for each stage. It goes on after a stage that fails.
"""
