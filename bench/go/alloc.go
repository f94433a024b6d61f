// Allocation: the garbage collector frees.
package main

import "sync"

const (
	allocators       = 2 // one per proc
	smallBytes       = 48
	pairsEach        = 500_000
	keptBlocks       = 64
	mixedMin         = 8
	mixedMax         = 2_000
	replacementsEach = 100_000
	handoffMin       = 64
	handoffMax       = 512
	batchBlocks      = 64
	batchSlots       = 16
	batchesEach      = 500
	handoffBlocks    = parties * batchesEach * batchBlocks
)

// randomBytes is a size from least to most, from the upper half of a random number.
func randomBytes(random uint64, least, most uint64) uint64 {
	return least + (random>>32)%(most-least+1)
}

func allocating(a args, opsEach int, work func(seed int)) report {
	m := newMeter(a, allocators*opsEach)
	var wg sync.WaitGroup
	for m.anotherRound() {
		for i := range allocators {
			wg.Go(func() { work(i) })
		}
		wg.Wait()
	}
	return m.report()
}

// allocSmall drops a block when it makes the next one. The block outlives its turn of the loop,
// so it is on the heap.
func allocSmall(a args) report {
	return allocating(a, pairsEach, func(int) {
		block, freed := []byte{0}, 0
		for range pairsEach {
			freed += int(block[0])
			block = make([]byte, smallBytes)
			block[0] = 1
		}
		check(freed+int(block[0]) == pairsEach)
	})
}

// allocMixed replaces the block in a random slot.
func allocMixed(a args) report {
	return allocating(a, replacementsEach, func(seed int) {
		var slots [keptBlocks][]byte
		random, freed := uint64(seed)+1, 0
		for range replacementsEach {
			random = step(random)
			block := make([]byte, randomBytes(random, mixedMin, mixedMax))
			block[0] = 1
			slot := &slots[random%keptBlocks]
			if *slot != nil {
				freed += int((*slot)[0])
			}
			*slot = block
		}
		for _, block := range slots {
			if block != nil {
				freed += int(block[0])
			}
		}
		check(freed == replacementsEach)
	})
}

func allocHandoff(a args) report {
	m := newMeter(a, handoffBlocks)
	for m.anotherRound() {
		sums := make(chan int, parties)
		for p := range parties {
			ch := make(chan [][]byte, batchSlots)
			go func() {
				random := uint64(p) + 1
				for range batchesEach {
					batch := make([][]byte, batchBlocks)
					for i := range batch {
						random = step(random)
						batch[i] = make([]byte, randomBytes(random, handoffMin, handoffMax))
						batch[i][0] = 1
					}
					ch <- batch
				}
				close(ch)
			}()
			go func() {
				freed := 0
				for batch := range ch {
					for _, block := range batch {
						freed += int(block[0])
					}
				}
				sums <- freed
			}()
		}
		freed := 0
		for range parties {
			freed += <-sums
		}
		check(freed == handoffBlocks)
	}
	return m.report()
}
