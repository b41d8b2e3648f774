import java.io.IOException;

/**
 * A batch in chunks, which asks between two of them whether its run still holds the lock. Run it with
 * `batchguard run --key 100:1 -- java DailySales.java 3`; batchguard kills it when the lock is lost. The question is for
 * the case that batchguard itself is stopped and cannot.
 */
public class DailySales {
    public static void main(String[] args) throws IOException, InterruptedException {
        int chunks = Integer.parseInt(args[0]);
        long milliseconds = Long.parseLong(System.getenv().getOrDefault("CHUNK_MILLISECONDS", "500"));
        System.out.println("run " + System.getenv("BATCHGUARD_RUN_ID") + ", token " + System.getenv("BATCHGUARD_TOKEN"));
        for (int chunk = 1; chunk <= chunks; chunk++) {
            stopUnlessStillHeld();
            Thread.sleep(milliseconds); // the work of one chunk, a transaction of its own
            System.out.println("chunk " + chunk + " done");
        }
        System.out.println("all done");
    }

    /** Any answer but 0 ends the batch: what cannot be told is no yes. */
    private static void stopUnlessStillHeld() throws IOException, InterruptedException {
        int code = new ProcessBuilder("batchguard", "still-held").inheritIO().start().waitFor();
        if (code != 0) {
            System.out.println("stopped before the next chunk");
            System.exit(code);
        }
    }
}
