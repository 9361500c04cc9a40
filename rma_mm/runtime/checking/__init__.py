"""What is checked while RMA_MM_CHECK is 1, of every mesh made then. Nothing else changes, and nothing is counted.

- Every get begins on a poisoned place, and what it brought is held against what its target holds (`windows.checked`).
- What ranks accumulate between two meetings is held against what the memory of each target has become (`pushes`).
- A frame of scratch is poisoned when it is given to another slot, and when its last slot is done with (`slots`).
- For beta = 0 C is poisoned before the first operation; none of that may be left. All replicas of C must hold the same
  bits, and C is verified from the tiles of A and B, which collectives move and no window (`product`).
- What is redistributed is poisoned first, and held against its source element by element, in all replicas (`contents`).

What is found becomes one CheckError on every rank, at the end of the product or the redistribution. Poison is NaN of
bits of its own, or bytes A5. Of integers poison that was left shows only as a wrong element of C, or as replicas that
differ. It takes several times as long and copies of what is moved: C, and all that is accumulated between two meetings.

The switch is read where a mesh is made, and nowhere else; without it binding makes the calls that it always made.
"""
