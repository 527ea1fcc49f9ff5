package iam

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

// BenchmarkDecide decides for a user who holds a role in each of many projects, about one after the other, what the
// role allows and what it does not.
func BenchmarkDecide(b *testing.B) {
	for _, projects := range []int{1, 100, 10_000} {
		b.Run(fmt.Sprintf("projects=%d", projects), func(b *testing.B) {
			p := Principal{Type: principal.User, ID: "u", OrgID: "acme"}
			for i := range projects {
				p.Bindings = append(p.Bindings, Binding{Role: ProjectAdmin, ProjectID: fmt.Sprintf("%032d", i)})
			}
			asked := []Permission{InstanceCreate, InstanceRead, NodeWrite, UserRead}
			var times []time.Duration
			for i := 0; b.Loop(); i++ {
				began := time.Now()
				d, err := Decide(p, asked[i%len(asked)], "acme", p.Bindings[i*7919%projects].ProjectID)
				times = append(times, time.Since(began))
				if err != nil || d.Allowed != (i%len(asked) < 2) {
					b.Fatal(d, err)
				}
			}
			slices.Sort(times)
			for _, percent := range []int{50, 99} {
				took := times[(len(times)-1)*percent/100]
				b.ReportMetric(float64(took.Nanoseconds())/1000, fmt.Sprintf("p%d-µs", percent))
			}
		})
	}
}
