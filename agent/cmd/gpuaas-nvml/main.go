// Command gpuaas-nvml asks NVIDIA's driver, prints one JSON document, and ends: the machine's accelerators, or with the
// argument cdi and the ids of some, what containers need to use these. The agent starts it for each question: a driver
// that hangs only hangs this process. With the argument mps it runs the MPS daemon of a GPU instead, and with
// mps-end it lets every program use the GPU of one that was killed. It is the one program of a node that needs cgo.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/protocol"
)

// maxRun ends a process whose agent has ended and cannot kill it any more.
const maxRun = 2 * time.Minute

func main() {
	root := flag.String("driver-root", "/", "directory in which NVIDIA's driver is installed")
	flag.Parse()
	if args := flag.Args(); len(args) == 5 && args[0] == "mps" {
		fmt.Fprintln(os.Stderr, runMPS(*root, args[1], args[2], args[3], args[4]))
		os.Exit(1)
	}
	time.AfterFunc(maxRun, func() { os.Exit(1) })
	out, err := answer(*root, flag.Args())
	if err == nil {
		_, err = os.Stdout.Write(out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func answer(root string, args []string) ([]byte, error) {
	switch {
	case len(args) == 0:
		found, err := accelerators(root)
		if err != nil {
			return nil, err
		}
		return protojson.Marshal(&protocol.NodeFacts{Accelerators: found})
	case args[0] == "cdi" && len(args) > 1:
		spec, err := cdiSpec(root, args[1:])
		if err != nil {
			return nil, err
		}
		return json.Marshal(spec)
	case args[0] == "mps-end" && len(args) == 2:
		return nil, endMPS(root, args[1])
	}
	return nil, errors.New("usage: gpuaas-nvml [--driver-root DIRECTORY] [cdi ID...]")
}
