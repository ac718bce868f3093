"""One step of one node: declare, admit, plan, forward, commit, publish over explicit resources."""
