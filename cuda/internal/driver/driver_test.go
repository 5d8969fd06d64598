package driver_test

import (
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

// sticky are the results that end a context, or a process, by NVIDIA's own words.
var sticky = []int{214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911}

func TestSticky(t *testing.T) {
	for _, code := range append([]int{709, 999}, sticky...) {
		if !(&driver.Error{Code: code}).Sticky() {
			t.Errorf("%d is not sticky", code)
		}
	}
	for _, code := range []int{0, 1, driver.OutOfMemory, 101, 201, driver.NotFound, driver.NotReady, 701, driver.PeerAlready, 708, 711, 712, 713, 720, 800, driver.NotSupported} {
		if (&driver.Error{Code: code}).Sticky() {
			t.Errorf("%d is sticky", code)
		}
	}
}

// header is the variable that names a cuda.h of NVIDIA's.
const header = "KVFERRY_CUDA_HEADER"

// Of every result, NVIDIA's header says whether the context is broken for good.
func TestStickyIsAsTheHeaderSays(t *testing.T) {
	name := os.Getenv(header)
	if name == "" {
		t.Skip(header + " names no cuda.h of NVIDIA's: make cuda-headers does")
	}
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	says := regexp.MustCompile(`must be (terminated|destroyed)|[Uu]ncorrectable`)
	var list []int
	all := 0
	for comment := range strings.SplitSeq(string(text), "/**") {
		comment, code, _ := strings.Cut(comment, "*/")
		m := regexp.MustCompile(`^\s*CUDA_ERROR_\w+\s*=\s*(\d+)`).FindStringSubmatch(code)
		if m == nil {
			continue
		}
		all++
		n, _ := strconv.Atoi(m[1])
		if says.MatchString(strings.Join(strings.Fields(strings.ReplaceAll(comment, "*", " ")), " ")) {
			list = append(list, n)
		}
	}
	if slices.Sort(list); !slices.Equal(list, sticky) {
		t.Errorf("the header, of %d results, says so of %v, we of %v", all, list, sticky)
	}
}
