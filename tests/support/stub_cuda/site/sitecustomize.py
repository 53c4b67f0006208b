"""Python imports this file in every process of a rehearsal; it installs `tests.support.stub_cuda.stand_ins`."""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

from tests.support.stub_cuda.stand_ins import INSTALLERS, install


class _Finder(MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname not in INSTALLERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            install(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
