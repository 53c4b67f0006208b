"""How a command ends: the kinds of endings, their exit codes and the screen that explains one."""
