package cli

import (
	"fmt"
	"strings"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// showServices writes a table of the services of an app of several.
func showServices(s *session, i client.AppInstance) error {
	var services []client.MemberService
	for _, m := range i.Members {
		services = append(services, m.Services...)
	}
	if len(services) == 0 {
		return nil
	}
	fmt.Fprintln(s.env.Stdout)
	return table(s.env.Stdout, services, []column[client.MemberService]{
		{"SERVICE", func(m client.MemberService) string { return m.Name }},
		{"STATUS", func(m client.MemberService) string {
			if m.StatusReason != "" {
				return string(m.Status) + " (" + string(m.StatusReason) + ")"
			}
			return string(m.Status)
		}},
		{"DEPENDS ON", func(m client.MemberService) string {
			on := make([]string, 0, len(m.DependsOn))
			for _, d := range m.DependsOn {
				on = append(on, d.Service+" "+strings.TrimPrefix(string(d.Condition), "service_"))
			}
			return strings.Join(on, ", ")
		}},
		{"ENDPOINT", func(m client.MemberService) string {
			var urls []string
			for _, e := range i.Endpoints {
				if e.Service == m.Name {
					urls = append(urls, e.URL)
				}
			}
			return strings.Join(urls, " ")
		}},
		{"RESTARTS", func(m client.MemberService) string { return fmt.Sprint(m.Restarts) }},
	})
}
