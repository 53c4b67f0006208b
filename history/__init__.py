"""History of each prompt: past response tokens, lengths and draft acceptance.

Every other package may import this one, including the planner and the engine's decode loop. It therefore imports
neither torch nor code about models or engines.
"""
