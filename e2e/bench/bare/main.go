// Command bare is the least that an HTTPS API can do for one row: gin, and one SELECT by primary key. The benchmark
// compares the hub with it. It prints its URL and serves until its input ends.
package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// instance is a row of app_instances, without its documents.
type instance struct {
	ID            string    `json:"id"`
	OrgID         string    `json:"org_id"`
	ProjectID     string    `json:"project_id"`
	AppSlug       string    `json:"app_slug"`
	DisplayName   string    `json:"display_name"`
	OperatingMode string    `json:"operating_mode"`
	Status        string    `json:"status"`
	Health        string    `json:"health"`
	Revision      int64     `json:"revision"`
	CreatedAt     time.Time `json:"created_at"`
	UpdatedAt     time.Time `json:"updated_at"`
}

const selectInstance = `SELECT id::TEXT, org_id::TEXT, project_id::TEXT, app_slug, display_name, operating_mode, status,
	health, revision, created_at, updated_at FROM app_instances WHERE id = $1`

func main() {
	if err := serve(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "bare:", err)
		os.Exit(1)
	}
}

func serve(ctx context.Context, databaseURL string) error {
	pool, err := pgxpool.New(ctx, databaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	gin.SetMode(gin.ReleaseMode)
	engine := gin.New()
	engine.GET("/app-instances/:id", func(c *gin.Context) {
		rows, _ := pool.Query(c.Request.Context(), selectInstance, c.Param("id"))
		i, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[instance])
		if err != nil {
			_ = c.AbortWithError(http.StatusInternalServerError, err)
			return
		}
		c.JSON(http.StatusOK, i)
	})
	server := httptest.NewUnstartedServer(engine)
	server.StartTLS()
	defer server.Close()
	fmt.Println(server.URL)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}
