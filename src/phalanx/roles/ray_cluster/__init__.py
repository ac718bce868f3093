"""A job on a Ray cluster: real placement groups, and one actor a machine of each replica.

Nothing here is imported unless a job asks for it (`launcher: ray`); only then does Ray have to be
installed. Ray decides what is free and where; what it gave is checked against the plan before
anything is started.
"""
