#!/usr/bin/env bash
# bert-24 on 4x8-v100-16gb: DeepSpeed with EvenPipe, started by DeepSpeed's launcher.
# On the first node, in this folder, which has the same path on all nodes:  bash launch.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

# DeepSpeed hands the folder's name to a shell on each node, without quotes.
case $PWD in
    *[!A-Za-z0-9_./+@:-]*) echo "launch.sh: $PWD: DeepSpeed can only go to folders with plain names: move this one" >&2; exit 1 ;;
esac

# The first of the hostfile, as the other nodes know it.
MASTER_ADDR=node0
MASTER_PORT=29500

# Every process runs train.sh, which has all that is yours: nothing of it goes through the shells in between.
exec deepspeed --hostfile hostfile --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    --no_local_rank --no_python bash train.sh
