package kv_test

import (
	"encoding/binary"
	"fmt"
	"log"
	"math"

	"github.com/kvferry/kvferry/internal/kv"
	"github.com/kvferry/kvferry/internal/page"
)

func small(pages int) kv.Cache {
	l := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: pages, PageSize: 4, Heads: 1, HeadDim: 2}
	c, err := kv.NewCache(l, make([]byte, l.Bytes()))
	if err != nil {
		log.Fatal(err)
	}
	return c
}

// fp32 is numbers as an engine might hand them over.
func fp32(numbers ...float32) []byte {
	var b []byte
	for _, f := range numbers {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

func numbers(fp32 []byte) []float32 {
	var list []float32
	for ; len(fp32) > 0; fp32 = fp32[4:] {
		list = append(list, math.Float32frombits(binary.LittleEndian.Uint32(fp32)))
	}
	return list
}

// Two tokens are written at the slots that a plan gave them, and read again.
func ExampleCache_Write() {
	cache := small(4)
	slots := []page.Slot{{Page: 2, Slot: 3}, {Page: 3, Slot: 0}}
	if err := cache.Write(0, slots, fp32(1, 2, 3, 4), fp32(5, 6, 7, 8), page.FP32); err != nil {
		log.Fatal(err)
	}
	k, v, err := cache.Read(0, slots, page.FP32)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("K:", numbers(k))
	fmt.Println("V:", numbers(v))
	// Output:
	// K: [1 2 3 4]
	// V: [5 6 7 8]
}

// A layer in place: the address of any element is a sum of index times stride.
func ExampleCache_Layer() {
	view, err := small(4).Layer(0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("page, K or V, slot, head, element:", view.Shape)
	fmt.Println("bytes from one to the next:", view.Strides)
	// Output:
	// page, K or V, slot, head, element: [4 2 4 1 2]
	// bytes from one to the next: [32 16 4 4 2]
}

// Six tokens go from two pages of an arena to two pages of the host tier, which
// has other pages and fewer of them.
func ExampleCopy() {
	arena, host := small(8), small(2)
	last := []page.Slot{{Page: 7, Slot: 1}}
	if err := arena.Write(0, last, fp32(1, 2), fp32(3, 4), page.FP32); err != nil {
		log.Fatal(err)
	}
	if err := kv.Copy(host, []page.Index{0, 1}, arena, []page.Index{5, 7}, 6); err != nil {
		log.Fatal(err)
	}
	k, v, err := host.Read(0, []page.Slot{{Page: 1, Slot: 1}}, page.FP32)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(numbers(k), numbers(v))
	// Output: [1 2] [3 4]
}

// What is too large for a type without infinities becomes NaN.
func ExampleConvert() {
	fp8 := make([]byte, 4)
	if err := kv.Convert(fp8, page.FP8E4M3, fp32(1, 1.06, 448, 1000), page.FP32); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("% x\n", fp8)
	back := make([]byte, 16)
	if err := kv.Convert(back, page.FP32, fp8, page.FP8E4M3); err != nil {
		log.Fatal(err)
	}
	fmt.Println(numbers(back))
	// Output:
	// 38 38 7e 7f
	// [1 1 448 NaN]
}
