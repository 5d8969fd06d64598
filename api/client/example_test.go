package client_test

import (
	"context"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// A decode engine brings a request in.
func ExampleClient_Open() {
	retrieve := func(ctx context.Context, socket, request, reference string) error {
		c, err := client.Dial(socket)
		if err != nil {
			return err
		}
		defer c.Close()
		s, err := c.Open(ctx, client.OpenOptions{Engine: "example", Role: "decode"})
		if err != nil {
			return err
		}
		defer s.Close()
		arena, err := s.Arena(ctx, s.Ranks()[0]) // its bytes are where kernels read and write
		if err != nil {
			return err
		}
		defer arena.Close()
		if _, err := s.Ingest(ctx, &kvferrypb.IngestRequest{Request: request}); err != nil {
			return err
		}
		_, err = s.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{
			Request: request, Reference: reference, Wait: durationpb.New(30 * time.Second),
		})
		return err
	}
	err := retrieve(context.Background(), "/run/kvferry/nobody.sock", "r1", "")
	fmt.Println(client.CodeOf(err), err != nil)
	// Output: UNSPECIFIED true
}
