"""Prompt to mp4 from Python: python examples/t2v.py "a red circle moves left on a black background" -o out.mp4"""

import argparse

import wanjax

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt")
parser.add_argument("-o", "--output", default="out.mp4")
parser.add_argument("-m", "--model", default="tiny", help="a preset, a folder in the diffusers layout, or a hub id")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

wan = wanjax.load(args.model)
frames = wanjax.generate(wan, args.prompt, seed=args.seed, callback=lambda step, timestep, latents: print(f"step {step + 1}"))
wanjax.save_video(args.output, frames[0], fps=wan.preset.fps)
print(f"wrote {args.output}: {frames.shape[1]} frames of {frames.shape[3]} x {frames.shape[2]}")
