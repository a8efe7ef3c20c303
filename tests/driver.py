"""
Many runs of train.py by one start of torchrun, for starting is what takes long:
torchrun ... tests/driver.py '[["--key=value", ...], ...]'
"""
import json
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist

script = str(Path(__file__).resolve().parents[1] / 'train.py')
sys.path.insert(0, os.path.dirname(script))
dist.init_process_group('gloo')
dist.init_process_group = dist.destroy_process_group = lambda *args, **keys: None
dist.rendezvous = lambda url: iter([(dist.HashStore(), int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))])
for words in json.loads(sys.argv[1]):
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name='__main__')
    except Exception as e:
        print(f'rank {os.environ["RANK"]}: {type(e).__name__}: {e}', flush=True)
dist.barrier()
sys.stdout.flush()
os._exit(0)  # past the end of Python: torch's threads abort about one of 50 processes there on a busy machine
