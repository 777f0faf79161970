"""Checkpoints in object storage, such as `checkpoint.dir="s3://bucket/run"`.

    urls.py          what a URL may be; imports no client
    store.py         Store: puts, gets, lists and deletes objects, with obstore
    saving.py        writes a checkpoint: each writer its files, then its record; the manifest last
    listing.py       the checkpoints under a URL, and what is left of unfinished ones
    fetching.py      copies files of a checkpoint into a folder of this node, or only verifies them
    lease.py         the lock of a run: an object that its holder renews
    service.py       the program that locks, lists and fetches for a rank, which does not import obstore
    client.py        Service: a rank's handle on that program
    choosing.py      the checkpoints that a URL may mean, for `ddpkit export` and `load_model`
    remote.py        a checkpoint in object storage as a reader sees it; the holder of a lock
    command_line.py  arguments of commands that are folders or URLs; waits that Ctrl-C ends

Objects have the names that a folder of checkpoints has, so a copy of all objects in a folder can be read as one:

    step-00000012/manifest.json          put last: a step without it does not exist
    step-00000012/TOKEN/...              the files of one save; a manifest names the token of its files
    set-aside-.../step-00000024/manifest.json    a checkpoint of an abandoned branch; its files stay where they are
    .lock                                the run that writes here
"""
