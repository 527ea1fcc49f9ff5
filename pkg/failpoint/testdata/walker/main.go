// Command walker passes one point three times and says so.
package main

import (
	"fmt"

	"github.com/gpuaas/gpuaas/pkg/failpoint"
)

func main() {
	defer fmt.Println("deferred")
	for n := range 3 {
		failpoint.Hit("walker/step")
		fmt.Println(n + 1)
	}
}
