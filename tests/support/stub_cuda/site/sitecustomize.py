"""Python imports this file in every process of a rehearsal; it installs `tests.support.stub_cuda.stand_ins`."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

MODULES = ("vllm.v1.outputs", "megatron_rl.trainer.learner", "megatron_rl.quantization.formats")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from tests.support.stub_cuda.stand_ins import install

            install(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
