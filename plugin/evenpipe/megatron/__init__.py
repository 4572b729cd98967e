"""The only room that names Megatron. Importing it readies the process for a script of Megatron-LM.

A script that says `import evenpipe.megatron` before its other imports knows EvenPipe's flags; with none of them given,
it runs as if that line were not there.
"""

from evenpipe.megatron.script import install

install()
