package memory_test

import (
	"fmt"
	"log"
	"net"
	"os"
	"path/filepath"

	"github.com/kvferry/kvferry/internal/memory"
)

// One process makes a region and hands it over, the other one maps it.
func Example() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	listener, err := net.Listen("unix", filepath.Join(dir, "fd"))
	if err != nil {
		log.Fatal(err)
	}
	defer listener.Close()

	region, err := memory.New("arena-0", 1<<20)
	if err != nil {
		log.Fatal(err)
	}
	defer region.Close()
	copy(region.Bytes(), "pages")

	engine, err := net.Dial("unix", listener.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	defer engine.Close()
	daemon, err := listener.Accept()
	if err != nil {
		log.Fatal(err)
	}
	defer daemon.Close()

	if err := memory.SendFile(daemon.(*net.UnixConn), []byte("arena of rank 0"), region.File()); err != nil {
		log.Fatal(err)
	}
	payload := make([]byte, memory.MaxPayload)
	n, file, err := memory.ReceiveFile(engine.(*net.UnixConn), payload)
	if err != nil {
		log.Fatal(err)
	}
	arena, err := memory.Map(file, region.Size(), true)
	if err != nil {
		log.Fatal(err)
	}
	defer arena.Close()
	fmt.Printf("%s: %s\n", payload[:n], arena.Bytes()[:5])
	// Output: arena of rank 0: pages
}

func ExampleSealTable() {
	table, err := memory.NewSealTable()
	if err != nil {
		log.Fatal(err)
	}
	defer table.Close()
	table.Store(3, 42) // held
	fmt.Println(table.Load(3))
	table.Store(3, 0) // let go
	fmt.Println(table.Load(3))
	fmt.Println(table.Load(memory.Words))
	// Output:
	// 42 true
	// 0 true
	// 0 false
}
