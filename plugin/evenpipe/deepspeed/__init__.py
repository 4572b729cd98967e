"""The only room that names DeepSpeed. Importing it lets a section "evenpipe" of DeepSpeed's configuration take effect.

A script that says `import evenpipe.deepspeed` and whose configuration has no such section runs as if that line were not
there.
"""

from evenpipe.deepspeed.install import install

install()
