#!/bin/bash
if [ "$(cat answer.txt)" = 09:25 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
